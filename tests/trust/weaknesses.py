"""Plant known weaknesses in the sources, one at a time, and see that a line of docs/trust.md's table turns red.

    python tests/trust/weaknesses.py              # all of them, with the short version; exits with 1 if one is missed
    python tests/trust/weaknesses.py header       # those whose name contains a word
    python tests/trust/weaknesses.py --markdown   # the table for docs/trust.md

As tests/faults.py does; here only tests of a promise count, and what is reported is the promise.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import Fault, report

ATTACK = "tests/trust/test_server_under_attack.py"
ODD_PLACES = "tests/trust/test_odd_places.py"
THREADS = "tests/trust/test_threads.py"
LIMITS = "tests/trust/test_server_limits.py"

WEAKNESSES = [
    Fault(
        "files are renamed before they are on disk",
        "foundation/files.py",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "",
        ODD_PLACES,
    ),
    Fault(
        "the manifest is not compared",
        "hub/manifest.py",
        "if _entry(path) != entry:",
        "if False:",
        "tests/trust/test_bit_flips.py",
    ),
    Fault(
        "torch.load runs what a pickle says",
        "hub/hf_directory.py",
        "weights_only=True",
        "weights_only=False",
        "tests/hub/test_bad_directories.py",
    ),
    Fault(
        "a link may lead out of a directory",
        "foundation/files.py",
        "if not (real.is_relative_to(home) or real.is_relative_to(blobs)):",
        "if False:",
        "tests/hub/test_bad_directories.py",
    ),
    Fault(
        "an image may be of any format",
        "data/images.py",
        "image = Image.open(file, formats=formats)",
        "image = Image.open(file)",
        "tests/trust/test_hostile_files.py",
    ),
    Fault(
        "numbers that are not finite are seen too late",
        "training/loop.py",
        "if not finite_loss or not (finite_norm or may_skip):",
        "if False:",
        "tests/trust/test_not_finite.py",
    ),
    Fault(
        "a body's size is not limited",
        "web/requests.py",
        "if len(body) > limits.body_bytes:",
        "if False:",
        ATTACK,
    ),
    Fault(
        "a body may take as long as it likes",
        "web/requests.py",
        "async with asyncio.timeout(limits.body_seconds):",
        "async with asyncio.timeout(None):",
        ATTACK,
    ),
    Fault(
        "the security policy is missing from the headers",
        "web/requests.py",
        '    (b"content-security-policy", _POLICY),\n',
        "",
        "tests/web/test_api.py",
    ),
    Fault(
        "any Host is answered",
        "web/requests.py",
        "if len(host) != 1 or not self._is_own_host(host[0]):",
        "if len(host) != 1:",
        ATTACK,
    ),
    Fault(
        "any Origin may ask",
        "web/requests.py",
        'if not (self._allow_origins & {"*", origin.lower()} or _is_origin(origin, host[0])):',
        "if False:",
        ATTACK,
    ),
    Fault(
        "the key is not compared",
        "web/requests.py",
        "if key is None:",
        "if key is None and not sent_keys:",
        LIMITS,
    ),
    Fault(
        "other machines are let in without a key",
        "web/server.py",
        "if not is_local(host) and api_key is None and needs_key:",
        "if False:",
        LIMITS,
    ),
    Fault(
        "a connection may stay without a request",
        "web/server.py",
        "if self.cycle is last:",
        "if False:",
        LIMITS,
    ),
    Fault(
        "work goes on when its client has left",
        "web/requests.py",
        "            if not complete:\n                app.cancel()\n",
        "",
        LIMITS,
    ),
    Fault(
        "the server ends when every answer is complete",
        "web/server.py",
        "timeout_graceful_shutdown=shutdown_seconds",
        "timeout_graceful_shutdown=None",
        "tests/web/test_serve.py",
    ),
    Fault(
        "text in drawings is not escaped",
        "web/static/pen.js",
        'fill="${fill}">${escape(text)}</text>',
        'fill="${fill}">${text}</text>',
        "tests/web/test_markup.py",
    ),
    Fault(
        "a text can end the script of look.html",
        "lens/render_html.py",
        '.replace("<", "\\\\u003c")',
        "",
        "tests/web/test_markup.py",
    ),
    Fault(
        "two threads record into one look",
        "lens/capture.py",
        "with _recorder_lock, return_freed_memory(n_tokens),",
        "with return_freed_memory(n_tokens),",
        THREADS,
    ),
    Fault(
        "an intervention reaches other threads",
        "attention/edits.py",
        "return owner in self._modules and self._thread == threading.get_ident()",
        "return owner in self._modules",
        THREADS,
    ),
    Fault(
        "a user without a home is not foreseen",
        "foundation/files.py",
        "except RuntimeError:  # a user without a home",
        "except KeyError:  # a user without a home",
        ODD_PLACES,
    ),
    Fault(
        "model files keep the mode 0600",
        "foundation/files.py",
        "        _apply_umask(new)\n",
        "",
        ODD_PLACES,
    ),
    Fault(
        "a command asks the network",
        "cli/doctor.py",
        "    from regard.foundation.files import cache_folder\n",
        '    __import__("socket").getaddrinfo("x.org", 443)\n    from regard.foundation.files import cache_folder\n',
        "tests/trust/test_supply_chain.py",
    ),
]


def red_line(output: str) -> str | None:
    """The line of the table that tells of a miss."""
    found = re.search(r"^promise (\d+ .+?: .+?) +tried", output, flags=re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    report(WEAKNESSES, "turns red", ("-m", "promise"), red_line)
