// The views, in the order of their tabs: the first that suits the look is the one that opens. One file each.
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

export const VIEWS = [image, align, sentence, heatmap, grid, walk, next, patterns, beams, variant];
