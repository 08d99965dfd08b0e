// Colours of weights: a path through OKLCH with lightness linear in the weight, so that equal steps look equal.
const STEPS = 256;
const PATHS = {
  light: { l: [0.985, 0.34], hue: [62, 18], chroma: 0.17 },
  dark: { l: [0.235, 0.94], hue: [20, 52], chroma: 0.15 },
};

function oklchToRgb(l, c, hue) {
  const a = c * Math.cos((hue * Math.PI) / 180), b = c * Math.sin((hue * Math.PI) / 180);
  const [x, y, z] = [
    l + 0.3963377774 * a + 0.2158037573 * b,
    l - 0.1055613458 * a - 0.0638541728 * b,
    l - 0.0894841775 * a - 1.291485548 * b,
  ].map((v) => v ** 3);
  const linear = [
    4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z,
    -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z,
    -0.0041960863 * x - 0.7034186147 * y + 1.707614701 * z,
  ];
  return linear.map((v) => {
    const inside = Math.min(1, Math.max(0, v));
    return Math.round(255 * (inside <= 0.0031308 ? 12.92 * inside : 1.055 * inside ** (1 / 2.4) - 0.055));
  });
}

function table({ l, hue, chroma }) {
  const out = new Uint8ClampedArray(STEPS * 3);
  for (let i = 0; i < STEPS; i++) {
    const t = i / (STEPS - 1);
    const c = chroma * Math.sin(Math.PI * Math.min(1, 0.04 + 0.72 * t)) ** 0.9;
    out.set(oklchToRgb(l[0] + (l[1] - l[0]) * t, c, hue[0] + (hue[1] - hue[0]) * t), 3 * i);
  }
  return out;
}

const TABLES = { light: table(PATHS.light), dark: table(PATHS.dark) };

/** Map weights 0 … max to 0 … 1; the logarithmic scale covers four decades below max. */
export function scaled(value, max, log) {
  if (!(value > 0) || !(max > 0)) return 0;
  return log ? Math.max(0, 1 + Math.log10(value / max) / 4) : Math.min(1, value / max);
}

export function heat(t, theme) {
  const at = 3 * Math.round(Math.min(1, Math.max(0, t)) * (STEPS - 1)), from = TABLES[theme];
  return [from[at], from[at + 1], from[at + 2]];
}

export const css = ([r, g, b], alpha = 1) => (alpha === 1 ? `rgb(${r},${g},${b})` : `rgba(${r},${g},${b},${alpha})`);

/** The colour of category i of n: evenly spaced hues of equal lightness. */
export const hue = (i, n, theme) => (theme === "dark" ? oklchToRgb(0.5, 0.1, (360 * i) / n + 40) : oklchToRgb(0.86, 0.09, (360 * i) / n + 40));

/** A text colour with enough contrast on a heat colour. */
export function inkOn([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#1d1915" : "#fffaf4";
}

/** The colour of a signed number: accent for positive, slate for negative. */
export function signed(value, max, theme) {
  const t = max > 0 ? Math.min(1, Math.abs(value) / max) : 0;
  if (value >= 0) return heat(0.72 * t, theme);
  const zero = heat(0, theme), minus = theme === "dark" ? [150, 178, 205] : [58, 88, 120];
  return zero.map((c, i) => Math.round(c + (minus[i] - c) * t));
}

/** The page's own colours, read from its style sheet. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    theme: of("theme") || "light", paper: of("paper"), ink: of("ink"), quiet: of("quiet"), line: of("line"),
    accent: of("accent"), wash: of("wash"), font: of("font"),
  };
}
