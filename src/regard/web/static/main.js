import { Server } from "./api.js";
import { App } from "./app.js";

new App(document.getElementById("app"), new Server()).start();
