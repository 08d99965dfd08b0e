// The views, one file each, in the order of their tabs; the first that suits the look opens by default.
import "../server_words.js";
import align from "./align.js";
import beams from "./beams.js";
import contributions from "./contributions.js";
import experts from "./experts.js";
import grid from "./grid.js";
import heatmap from "./heatmap.js";
import history from "./history.js";
import image from "./image.js";
import next from "./next.js";
import patching from "./patching.js";
import patterns from "./patterns.js";
import sentence from "./sentence.js";
import story from "./story.js";
import variant from "./variant.js";
import walk from "./walk.js";
import why from "./why.js";

export const VIEWS = [story, image, align, sentence, heatmap, grid, walk, next, contributions, why, patching, patterns, experts, history, beams, variant];
export { viewTerms } from "../terms.js";
