// The views of a page without a server, which need only weights; replaces index.js there.
import align from "./align.js";
import grid from "./grid.js";
import heatmap from "./heatmap.js";
import image from "./image.js";
import patterns from "./patterns.js";
import sentence from "./sentence.js";

export const VIEWS = [image, align, sentence, heatmap, grid, patterns];
export const viewTerms = () => []; // only the server has the course
