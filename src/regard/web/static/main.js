// Starts the page with its data source: numbers embedded in the page (lens/render_html.py), a model that runs in it, or a server.
import { Server } from "./api.js";
import { App } from "./app.js";
import { Offline } from "./offline.js";

const given = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");

async function backEnd() {
  const content = given("look");
  if (content) return new Offline(content);
  if (!document.querySelector('meta[name="regard"][content="page"]')) return new Server();
  const { PageSource } = await import("./page/page_source.js");
  return new PageSource();
}

new App(document.getElementById("app"), await backEnd(), given("opening") ?? {}).start();
