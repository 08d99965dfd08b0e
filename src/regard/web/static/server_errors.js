// What the server refuses, in Korean: its English sentences are the keys, {…} stands for what differs each time.
const KOREAN = {
  "the answer has {size} bytes, {limit}; ask for less": "응답이 {size}바이트로, 한 번에 보낼 수 있는 크기를 넘습니다. 더 작은 범위를 골라 주세요.",
  "this look is at a text: it has no image": "문장을 살펴보는 중이라 이미지가 없습니다.",
  "kind={kind} is not one of this look's: {kinds}": "{kind} 어텐션은 이 모델에 없습니다. 있는 것: {kinds}",
  "specials=false leaves nothing of the {kind} attention: all its tokens are special": "특수 토큰을 숨기면 남는 토큰이 없습니다.",
  "this look was not written by a beam search; generate with beam=2 or more": "빔 탐색으로 쓴 문장이 아닙니다. 빔을 2 이상으로 골라 다시 써 주세요.",
  "{host}; open http://127.0.0.1 instead": "이 서버의 주소가 아닙니다. http://127.0.0.1 로 열어 주세요.",
  "a page of {origin} may not ask this server": "{origin}의 페이지는 이 서버에 요청할 수 없습니다.",
  "Content-Length {length} is not a number": "Content-Length {length}은(는) 숫자가 아닙니다.",
  "a body of {size} bytes is more than the {most} allowed": "보낸 내용이 {size}바이트로, 허용된 {most}바이트를 넘습니다.",
  "a body with {n} {what} is more than the {most} allowed": "보낸 내용의 {what} 수가 {n}개로, 허용된 {most}개를 넘습니다.",
  "this server needs a key: Authorization: Bearer KEY, or /?key=KEY in a browser": "이 서버에는 키가 필요합니다. 주소에 /?key=KEY를 붙여 열어 주세요.",
  "other requests take all memory for bodies; ask again in a moment": "다른 요청이 메모리를 모두 쓰고 있습니다. 잠시 뒤에 다시 시도해 주세요.",
  "the body did not arrive within {seconds} s": "{seconds}초 안에 내용이 모두 도착하지 않았습니다.",
  "model {model} is not open here; there is {models}": "{model} 모델은 열려 있지 않습니다. 열린 모델: {models}",
  "model {model} reads an image; give one as base64 in the field image": "{model} 모델은 이미지를 읽습니다. 이미지를 골라 주세요.",
  "model {model} reads {what}, not an image": "{model} 모델은 이미지를 읽지 않습니다.",
  "model {model} has no target; its text is all it reads": "{model} 모델에는 번역문이 없습니다.",
  "{name} has {n} characters; for model {model} at most {most} are read": "문장이 {n}자입니다. {model} 모델은 {most}자까지 읽습니다.",
  "{name} has {n} characters; {limit}": "문장이 {n}자로, 이 모델이 읽을 수 있는 길이를 넘습니다.",
  "{name}: string should have at most {most} characters": "문장은 {most}자까지 넣을 수 있습니다.",
  "text is empty: there is nothing to look at": "문장이 비어 있어 살펴볼 것이 없습니다.",
  "model {model} writes no text, so there is nothing to generate": "{model} 모델은 글을 쓰지 않습니다.",
  "target and generate are both given: a target is either told or written": "번역문을 직접 넣거나 모델이 쓰게 하거나, 둘 중 하나만 할 수 있습니다.",
  "the text has {n} tokens; at most {most} are looked at": "문장이 {n}토큰입니다. {most}토큰까지 살펴볼 수 있습니다.",
  "image is not base64": "이미지를 읽을 수 없습니다(base64가 아닙니다).",
  "image has {size} pixels, more than the {most} allowed": "이미지가 {size}픽셀로, 허용된 {most}픽셀을 넘습니다.",
  "image has {what}": "이미지를 쓸 수 없습니다: {what}",
  "image is none of {formats}": "지원하는 이미지 형식이 아닙니다. 쓸 수 있는 형식: {formats}",
  "image cannot be read: {why}": "이미지를 읽을 수 없습니다: {why}",
  "there is no look {look}, or it is no longer kept: open it again": "서버가 이 화면을 더는 갖고 있지 않습니다. ‘보기’를 다시 눌러 주세요.",
  "q and k of this text take {needed}, and the server keeps {most} at most": "이 문장의 q와 k가 {needed}로, 서버가 보관하는 {most}를 넘습니다. 더 짧은 문장을 넣어 주세요.",
  "this takes longer than {seconds} s; {hint}": "{seconds}초 넘게 걸려 멈추었습니다. 더 짧은 문장을 넣거나 더 작은 범위를 골라 주세요.",
  "the text is not finished after {seconds} s": "{seconds}초가 지나도록 글이 끝나지 않아 멈추었습니다.",
  "the server is about to end": "서버가 곧 종료됩니다.",
  "{n} requests are waiting already; ask again in a moment": "이미 요청 {n}개가 기다리고 있습니다. 잠시 뒤에 다시 시도해 주세요.",
  "model {model} writes no text": "{model} 모델은 글을 쓰지 않습니다.",
  "beam={beam} has no text before all is done; a stream needs beam=1": "빔이 {beam}이면 다 쓴 뒤에야 글이 나옵니다. 쓰는 모습을 보려면 빔을 1로 골라 주세요.",
  "model {model} has no cross-attention to watch": "{model} 모델에는 크로스 어텐션이 없습니다.",
  "watch.{name}={index}: cross attention has {total}, 0 … {last}": "크로스 어텐션의 범위를 벗어났습니다({name} {index}).",
  "{name}={index}: {kind} attention has {total}, 0 … {last}": "{kind} 어텐션의 범위를 벗어났습니다({name} {index}).",
  "{name} {start} … {stop} do not lie within 0 … {total}": "{name} {start} … {stop}은(는) 0 … {total} 범위를 벗어납니다.",
  "{name} {start} … {stop} are {n}; at most {most} are sent at once": "{name} {start} … {stop}은(는) {n}개입니다. 한 번에 {most}개까지 보냅니다.",
  "{name}={index} does not lie within 0 … {last}": "{name} {index}은(는) 0 … {last} 범위를 벗어납니다.",
  "{name} has {n} tokens, but this model reads at most max_len={most}": "문장이 {n}토큰입니다. 이 모델은 {most}토큰까지 읽습니다.",
  "{name} is empty: there is nothing to look at": "내용이 비어 있어 살펴볼 것이 없습니다.",
  "something went wrong here ({name}); the server's log says more": "서버에서 문제가 생겼습니다({name}). 자세한 내용은 서버의 출력에 있습니다.",
};

const literal = (text) => text.replace(/[.*+?^$()|[\]\\]/g, "\\$&");
const PATTERNS = Object.entries(KOREAN).map(([english, korean]) =>
  [new RegExp(`^${literal(english).replace(/\{(\w+)\}/g, "(?<$1>.+?)")}$`, "s"), korean]);

/** A sentence of the server in the reader's language; one that is not in the list stays English, and says whose it is. */
export function serverError(sentence, language) {
  if (language !== "ko") return sentence;
  for (const [pattern, korean] of PATTERNS) {
    const found = pattern.exec(sentence);
    if (found) return korean.replace(/\{(\w+)\}/g, (_, name) => found.groups[name]);
  }
  return `서버가 요청을 처리하지 못했습니다: ${sentence}`;
}
