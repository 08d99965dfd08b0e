// The views of a page without a server: those that need weights alone. It takes the place of index.js there.
import align from "./align.js";
import grid from "./grid.js";
import heatmap from "./heatmap.js";
import image from "./image.js";
import patterns from "./patterns.js";
import sentence from "./sentence.js";

export const VIEWS = [image, align, sentence, heatmap, grid, patterns];
