// The views, in the order of their tabs. One file each.
import align from "./align.js";
import beams from "./beams.js";
import grid from "./grid.js";
import heatmap from "./heatmap.js";
import image from "./image.js";
import next from "./next.js";
import patterns from "./patterns.js";
import sentence from "./sentence.js";
import variant from "./variant.js";
import walk from "./walk.js";

export const VIEWS = [image, heatmap, sentence, grid, walk, align, next, patterns, beams, variant];
