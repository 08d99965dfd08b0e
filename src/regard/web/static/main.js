// The page: with a server behind it, or with the numbers it needs inside (lens/page.py puts them there).
import { Server } from "./api.js";
import { App } from "./app.js";
import { Offline } from "./offline.js";

const given = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const content = given("look");
new App(document.getElementById("app"), content ? new Offline(content) : new Server(), given("opening") ?? {}).start();
