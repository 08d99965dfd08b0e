// The files of an exported page: fetched with progress, decompressed, checked against their SHA-256, and cached.
import { Failure } from "../api.js";

/** The bytes of a response; `onBytes` receives the size of each part. */
async function received(response, onBytes) {
  if (!response.body?.getReader) return new Uint8Array(await response.arrayBuffer());
  const reader = response.body.getReader(), parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    size += value.length;
    onBytes(value.length);
  }
  const all = new Uint8Array(size);
  let at = 0;
  for (const part of parts) { all.set(part, at); at += part.length; }
  return all;
}

/** Decompress gzip; bytes that the server already decompressed are returned unchanged. */
async function unpacked(bytes) {
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class PageFiles {
  /** `files`: {name: {bytes: transferred size, sha256: of the decompressed content}}, `digest`: of all files; both from page.json. */
  constructor(base, files, digest, onProgress) {
    Object.assign(this, { base, files, onProgress, done: 0, kept: null });
    if (globalThis.caches) this.kept = caches.open(`regard ${new URL(".", base).pathname} ${digest}`);
    this.total = Object.values(files).reduce((sum, file) => sum + file.bytes, 0);
  }

  async read(name) {
    const file = this.files[name], start = this.done, url = new URL(name, this.base), kept = await this.kept;
    let heard = 0;
    const known = await kept?.match(url), response = known ?? (await fetched(url));
    const packed = await received(response, (n) => {
      heard = Math.min(file.bytes, heard + n);
      this.onProgress(Math.min(1, (start + heard) / this.total));
    });
    const bytes = await unpacked(packed);
    this.done = start + file.bytes;
    this.onProgress(Math.min(1, this.done / this.total));
    // crypto.subtle only exists in secure contexts: https and localhost.
    if (globalThis.crypto?.subtle && (await sha256(bytes)) !== file.sha256) {
      await kept?.delete(url);
      throw new Failure(`${name} is not the file that was exported: its SHA-256 differs`);
    }
    if (!known) await kept?.put(url, new Response(packed)).catch(() => {}); // disk full: fetched again next time
    return bytes;
  }

  /** Register a service worker, which serves the cached files from the next visit on, also offline. */
  async keepForOffline() {
    if (!globalThis.navigator?.serviceWorker) return; // missing on plain http, except on localhost
    await navigator.serviceWorker.register(new URL("service_worker.js", this.base)).catch(() => {});
  }

  async json(name) { return JSON.parse(new TextDecoder().decode(await this.read(name))); }
}

async function fetched(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new Failure("offline");
  }
  if (!response.ok) throw new Failure(`${url.pathname}: ${response.status} ${response.statusText}`);
  return response;
}

/** page.json, which lists all other files. */
export async function readPage(base) {
  return (await fetched(new URL("page.json", base), { cache: "no-cache" })).json();
}
