// Serves the files of an exported page from the cache, also offline. The export fills in the two lines below.
const DIGEST = "@digest@";
const FILES = ["@files@"];
const PREFIX = `regard ${new URL(".", self.location.href).pathname} `, NAME = PREFIX + DIGEST;
const address = (name) => new URL(name, self.location.href).href;

async function keepAll() {
  const kept = await caches.open(NAME);
  for (const name of FILES) if (!(await kept.match(address(name)))) await kept.add(new Request(address(name), { cache: "no-cache" }));
  await self.skipWaiting();
}

async function dropOthers() {
  const names = await caches.keys();
  await Promise.all(names.filter((name) => name.startsWith(PREFIX) && name !== NAME).map((name) => caches.delete(name)));
  await self.clients.claim();
}

async function answer(request) {
  const kept = await caches.open(NAME), url = new URL(request.url);
  url.search = url.hash = "";
  return (await kept.match(url.href.endsWith("/") ? address("index.html") : url.href)) ?? fetch(request);
}

self.addEventListener("install", (event) => event.waitUntil(keepAll()));
self.addEventListener("activate", (event) => event.waitUntil(dropOthers()));
self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && new URL(request.url).origin === self.location.origin) event.respondWith(answer(request));
});
