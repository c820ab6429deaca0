// Layers by heads: as small maps of one token, or as a number each.

const EDGE = 22; // pixels for the numbers of rows and columns

class Matrix {
  // `pick(row, column)` is called by a click and by arrow keys; the first column is head 0.
  constructor(canvas, rows, columns, pick) {
    Object.assign(this, { canvas, rows, columns, pick, context: canvas.getContext("2d") });
    canvas.addEventListener("click", (event) => {
      const [row, column] = this.at(event);
      if (row >= 0) pick(row, column);
    });
  }

  // Cells so wide and high, in pixels of the page.
  resize(cell, tall = cell) {
    this.ratio = window.devicePixelRatio || 1;
    [this.cell, this.tall] = [cell, tall];
    const size = [EDGE + this.columns * cell, EDGE + this.rows * tall];
    [this.canvas.style.width, this.canvas.style.height] = size.map((n) => `${n}px`);
    [this.canvas.width, this.canvas.height] = size.map((n) => Math.round(n * this.ratio));
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.label();
  }

  label() {
    const { context, cell, tall } = this;
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.fillStyle = css("--soft");
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    const every = Math.ceil(16 / cell);
    for (let n = 0; n < this.columns; n += every) {
      context.fillText(n, EDGE + (n + 0.5) * cell, EDGE / 2);
    }
    context.textAlign = "right";
    for (let n = 0; n < this.rows; n += Math.ceil(12 / tall)) {
      context.fillText(this.name ? this.name(n) : n, EDGE - 6, EDGE + (n + 0.5) * tall);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - EDGE) / this.tall);
    const column = Math.floor((event.clientX - box.left - EDGE) / this.cell);
    const inside = row >= 0 && row < this.rows && column >= 0 && column < this.columns;
    return inside ? [row, column] : [-1, -1];
  }

  // Around the chosen cell, or around a whole row.
  mark(row, column) {
    const { context, cell, tall } = this;
    const [left, wide] = column === MEAN ? [0, this.columns] : [column, 1];
    context.strokeStyle = css("--worse");
    context.lineWidth = 2;
    context.strokeRect(EDGE + left * cell, EDGE + row * tall, wide * cell, tall);
  }

  numbers(values, [low, high]) {
    const { context, cell, tall } = this;
    const gap = cell > 6 ? 1 : 0;
    values.forEach((row, y) => {
      (row || []).forEach((value, x) => {
        const share = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
        const from = 3 * Math.round(255 * share);
        const colour = TABLES.number.slice(from, from + 3);
        context.fillStyle = value === null ? css("--panel") : `rgb(${colour})`;
        context.fillRect(EDGE + x * cell, EDGE + y * tall, cell - gap, tall - gap);
      });
    });
  }
}

// The atlas: for each layer and head, where the token looks.
class Atlas extends Matrix {
  fit(layers, width, height) {
    const sides = layers.flatMap((layer) => [layer.queries, layer.keys]);
    const grids = sides.map((side) => side.grid || [1, 1]);
    this.tile = [0, 1].map((axis) => Math.max(...grids.map((grid) => grid[axis])));
    const room = Math.max(32, (height - EDGE) / this.rows); // for a row
    const slope = this.tile[0] / this.tile[1];
    const most = Math.min(64, 64 / slope, room / slope, (width - EDGE) / this.columns);
    const cell = Math.max(10, Math.floor(most));
    this.resize(cell, Math.max(10, Math.round(cell * slope)));
    this.sheet = document.createElement("canvas");
  }

  // `found(layer)` gives place and weights of the layer's heads, or null.
  draw(layers, found, root) {
    const [high, wide] = this.tile;
    [this.sheet.width, this.sheet.height] = [wide * this.columns, high * this.rows];
    const sheet = this.sheet.getContext("2d");
    const data = sheet.createImageData(this.sheet.width, this.sheet.height);
    const drawn = [];
    layers.forEach((layer, row) => {
      for (let head = 0; head < layer.heads; head++) {
        const shown = found(row, head);
        if (!shown || !shown.side.grid) continue;
        fill(data, head * wide, row * high, shown, root);
        drawn.push([row, head, shown.side]);
      }
    });
    sheet.putImageData(data, 0, 0);
    const { context, cell, tall } = this;
    context.clearRect(EDGE, EDGE, this.columns * cell, this.rows * tall);
    context.imageSmoothingEnabled = cell * this.ratio < Math.max(high, wide);
    const gap = cell > 16 ? 2 : 1;
    for (const [row, head, side] of drawn) {
      const from = [head * wide, row * high, side.columns, side.rows];
      const [x, y] = [EDGE + head * cell, EDGE + row * tall];
      context.drawImage(this.sheet, ...from, x, y, cell - gap, tall - gap);
    }
  }
}
