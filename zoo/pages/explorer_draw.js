// Colours, and pictures under them.

const TABLES = Object.fromEntries(
  Object.entries(DATA.colours).map(([name, text]) => [name, bytesOf(text)]),
);
const LONGEST = 720; // pixels of a view's longer side, about

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function put(pixels, at, table, share) {
  const from = 3 * Math.round(255 * Math.min(1, Math.max(0, share || 0)));
  pixels[at] = table[from];
  pixels[at + 1] = table[from + 1];
  pixels[at + 2] = table[from + 2];
  pixels[at + 3] = 255;
}

const LEAST = 3; // even shares up to which the scale goes at least, or even weights would glow

// The end of the scale of colours.
function highest({ values, side, even }) {
  let top = Math.min(1, LEAST * even);
  for (let n = 0; n < side.patches; n++) top = Math.max(top, values[side.start + n]);
  return top;
}

// Weights of a side's patches as pixels, from (left, top) of an ImageData on.
function fill(data, left, top, shown, root) {
  const { values, side } = shown;
  const high = highest(shown);
  for (let y = 0; y < side.rows; y++) {
    for (let x = 0; x < side.columns; x++) {
      const share = values[side.start + y * side.columns + x] / high;
      const at = 4 * ((top + y) * data.width + left + x);
      put(data.data, at, TABLES.weight, root ? Math.sqrt(share) : share);
    }
  }
}

const scratch = document.createElement("canvas").getContext("2d");

function painted(shown, root) {
  const { side } = shown;
  const { canvas } = scratch;
  [canvas.width, canvas.height] = [side.columns, side.rows];
  const data = scratch.createImageData(side.columns, side.rows);
  fill(data, 0, 0, shown, root);
  scratch.putImageData(data, 0, 0);
  return canvas;
}

// An image, decoded once: in colours, and in the grey on which weights lie.
async function pictured(raw) {
  const image = new Image();
  image.src = raw.data;
  await image.decode();
  const times = Math.max(1, Math.round(LONGEST / Math.max(raw.width, raw.height)));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [raw.width * times, raw.height * times];
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = Math.max(raw.width, raw.height) > 64;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "saturation"; // of black, which has none
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

function drawView(context, grey, shown, place, options) {
  const { canvas } = context;
  context.globalAlpha = 1;
  context.drawImage(grey, 0, 0);
  const { side } = shown;
  if (side.grid) {
    context.globalAlpha = options.strength;
    context.imageSmoothingEnabled = options.smooth;
    context.imageSmoothingQuality = "high";
    const width = (canvas.width * side.columns * side.pool) / side.grid[1];
    const height = (canvas.height * side.rows * side.pool) / side.grid[0];
    context.drawImage(painted(shown, options.root), 0, 0, width, height);
    context.globalAlpha = 1;
  }
  if (place.y !== undefined) outline(context, place, shown.own);
}

// Around a patch, or the patches of which a query is the mean.
function outline(context, place, own) {
  const { width, height } = context.canvas;
  const [high, wide] = [height / own.grid[0], width / own.grid[1]];
  const [y, x] = [place.y, place.x].map((n) => Math.floor(n / own.pool) * own.pool);
  const box = [x * wide, y * high, own.pool * wide, own.pool * high];
  for (const [colour, line] of [["#000000", 7], ["#ffffff", 3]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(...box);
  }
}

function drawRamp(canvas, root) {
  const context = canvas.getContext("2d");
  const data = context.createImageData(256, 1);
  for (let n = 0; n < 256; n++) {
    put(data.data, 4 * n, TABLES.weight, root ? Math.sqrt(n / 255) : n / 255);
  }
  context.putImageData(data, 0, 0);
}
