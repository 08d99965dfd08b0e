// Image preprocessing: resized as Pillow does, cropped, scaled and normalised (mirrors text/image_processor.py).
import { Failure } from "../api.js";

/** {width, height, data: RGB bytes} of a data: URL or base64, rotated according to its EXIF orientation. */
export async function decodeImage(image) {
  if (image.data) return image;
  const text = image.startsWith("data:") ? image.slice(image.indexOf(",") + 1) : image;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  let bitmap;
  try {
    bitmap = await createImageBitmap(new Blob([bytes]), { premultiplyAlpha: "none", colorSpaceConversion: "none" });
  } catch {
    throw new Failure("image is not one of PNG, JPEG, WEBP, GIF, BMP");
  }
  const { width, height } = bitmap, context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const rgba = context.getImageData(0, 0, width, height).data, data = new Uint8Array(width * height * 3);
  for (let i = 0, j = 0; i < rgba.length; i += 4) for (let c = 0; c < 3; c++) data[j++] = rgba[i + c];
  return { width, height, data };
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
// Pillow's filters by number: [support, function of the distance].
const FILTERS = {
  1: [3, (x) => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0)],
  2: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  3: [2, (x) => {
    const a = -0.5, d = Math.abs(x);
    return d < 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : d < 2 ? (((d - 5) * d + 8) * d - 4) * a : 0;
  }],
  4: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  5: [1, (x) => {
    const d = Math.abs(x);
    return d === 0 ? 1 : d < 1 ? sinc(d) * (0.54 + 0.46 * Math.cos(Math.PI * d)) : 0;
  }],
};
const BITS = 22; // Pillow's coefficients are integer multiples of 2⁻²²

/** For each of `size` pixels [first source pixel, coefficients], as in Pillow's resample(). */
function shares(from, size, [reach, filter]) {
  const scale = from / size, wide = Math.max(scale, 1), support = reach * wide;
  return Array.from({ length: size }, (_, i) => {
    const centre = (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5)), last = Math.min(from, Math.trunc(centre + support + 0.5));
    const values = Array.from({ length: last - first }, (_, j) => filter((j + first - centre + 0.5) / wide));
    const sum = values.reduce((a, b) => a + b, 0);
    return [first, values.map((x) => { const y = (x / sum) * (1 << BITS); return Math.trunc(y < 0 ? y - 0.5 : y + 0.5); })];
  });
}

function resizeAxis({ width, height, data }, channels, size, filter, across) {
  const kernel = shares(across ? width : height, size, filter);
  const out = across ? { width: size, height } : { width, height: size };
  out.data = new Uint8Array(out.width * out.height * channels);
  const step = across ? channels : width * channels;
  for (let y = 0, at = 0; y < out.height; y++) {
    for (let x = 0; x < out.width; x++) {
      const [first, values] = kernel[across ? x : y];
      const start = across ? (y * width + first) * channels : (first * width + x) * channels;
      for (let c = 0; c < channels; c++, at++) {
        let sum = 2 ** (BITS - 1);
        for (let n = 0; n < values.length; n++) sum += data[start + n * step + c] * values[n];
        out.data[at] = Math.min(255, Math.max(0, Math.floor(sum / 2 ** BITS)));
      }
    }
  }
  return out;
}

/** Pillow's image.resize. */
export function resize(image, channels, width, height, resample) {
  if (resample === 0) return nearest(image, channels, width, height);
  let out = image;
  if (width !== out.width) out = resizeAxis(out, channels, width, FILTERS[resample], true);
  if (height !== out.height) out = resizeAxis(out, channels, height, FILTERS[resample], false);
  return out;
}

function nearest(image, channels, width, height) {
  const data = new Uint8Array(width * height * channels);
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const row = Math.trunc((y + 0.5) * (image.height / height)), col = Math.trunc((x + 0.5) * (image.width / width));
      for (let c = 0; c < channels; c++) data[at++] = image.data[(row * image.width + col) * channels + c];
    }
  }
  return { width, height, data };
}

/** RGB to greyscale, as Pillow's convert("L"). */
function grey({ width, height, data }) {
  const levels = Uint8Array.from({ length: width * height }, (_, i) =>
    (data[3 * i] * 19595 + data[3 * i + 1] * 38470 + data[3 * i + 2] * 7471 + 0x8000) >> 16);
  return { width, height, data: levels };
}

/** [width, height] after resizing; a single number is the shorter side, and the longer one is rounded down. */
function targetSize(size, width, height) {
  if (Array.isArray(size)) return [size[1], size[0]];
  const longer = Math.trunc((size * Math.max(width, height)) / Math.min(width, height));
  return width <= height ? [size, longer] : [longer, size];
}

/** Pixel values (1, C, height, width) with the settings of an ImageProcessor. */
export function pixelValues(rgb, { size, mean, std, rescale, resample, crop }) {
  const channels = mean.length;
  let image = channels === 1 ? grey(rgb) : rgb;
  if (size !== null) image = resize(image, channels, ...targetSize(size, image.width, image.height), resample);
  const [height, width] = crop ?? [image.height, image.width];
  const left = Math.floor((image.width - width) / 2), top = Math.floor((image.height - height) / 2);
  const values = new Float32Array(channels * height * width);
  for (let c = 0, at = 0; c < channels; c++) {
    for (let y = top; y < top + height; y++) {
      for (let x = left; x < left + width; x++, at++) {
        const inside = x >= 0 && y >= 0 && x < image.width && y < image.height;
        const level = inside ? image.data[(y * image.width + x) * channels + c] : 0;
        const share = Math.fround(level * Math.fround(rescale));
        values[at] = Math.fround(Math.fround(share - Math.fround(mean[c])) / Math.fround(std[c]));
      }
    }
  }
  return { dims: [1, channels, height, width], data: values };
}

/** The part of the image that the model reads, in the image's own resolution, as a data: URL of at most 640 pixels. */
export async function shownImage(rgb, { size, crop }) {
  if (typeof OffscreenCanvas === "undefined") return null;
  let [left, top, width, height] = [0, 0, rgb.width, rgb.height];
  if (crop) {
    const [wide, high] = size === null ? [rgb.width, rgb.height] : targetSize(size, rgb.width, rgb.height);
    [width, height] = [(crop[1] / wide) * rgb.width, (crop[0] / high) * rgb.height];
    [left, top] = [(rgb.width - width) / 2, (rgb.height - height) / 2];
  }
  const pixels = new ImageData(rgb.width, rgb.height);
  for (let i = 0; i < rgb.width * rgb.height; i++) {
    pixels.data.set(rgb.data.subarray(3 * i, 3 * i + 3), 4 * i);
    pixels.data[4 * i + 3] = 255;
  }
  const whole = new OffscreenCanvas(rgb.width, rgb.height);
  whole.getContext("2d").putImageData(pixels, 0, 0);
  const share = Math.min(1, 640 / Math.max(width, height));
  const part = new OffscreenCanvas(Math.max(1, Math.round(width * share)), Math.max(1, Math.round(height * share)));
  part.getContext("2d").drawImage(whole, left, top, width, height, 0, 0, part.width, part.height);
  const bytes = new Uint8Array(await (await part.convertToBlob({ type: "image/png" })).arrayBuffer());
  let letters = "";
  for (let i = 0; i < bytes.length; i += 8192) letters += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return `data:image/png;base64,${btoa(letters)}`;
}
