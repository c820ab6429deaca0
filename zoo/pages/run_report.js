for (const pre of document.querySelectorAll(".command pre")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.onclick = async () => {
    const range = document.createRange();
    range.selectNodeContents(pre);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  pre.after(button);
}
const short = (value) => {
  const digits = Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
  return value && Math.abs(value) < 1e-4 ? value.toExponential(2) : value.toLocaleString("en", digits);
};
for (const chart of document.querySelectorAll(".chart")) {
  const { x0, x1, y0, y1, log } = chart.dataset;
  const svg = chart.querySelector("svg"), box = svg.viewBox.baseVal;
  const cursor = chart.querySelector(".cursor"), output = chart.querySelector("output");
  const lines = [...chart.querySelectorAll("polyline")].map((line) => ({
    name: line.dataset.name, points: [...line.points].map(({ x, y }) => [x, y]),
  }));
  const steps = [...new Set(lines.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const x = steps[at];
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    const shown = lines.flatMap(({ name, points }) => {
      const near = points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
      if (Math.abs(near[0] - x) > 1e-6) return [];
      const value = +y0 + (1 - near[1] / box.height) * (y1 - y0);
      const text = short(log ? 10 ** value : value);
      return [lines.length > 1 ? `${name} ${text}` : text];
    });
    const step = Math.round(+x0 + (x / box.width) * (x1 - x0));
    const more = shown.length > 4 ? `, ${shown.length - 4} more` : "";
    output.textContent = `step ${step.toLocaleString("en")}: ${shown.slice(0, 4).join(", ")}${more}`;
  };
  const hide = () => {
    cursor.style.visibility = "hidden";
    output.textContent = "";
  };
  chart.onpointermove = (event) => {
    const place = svg.getBoundingClientRect();
    const x = ((event.clientX - place.left) / place.width) * box.width;
    show(steps.reduce((a, _, i) => (Math.abs(steps[i] - x) < Math.abs(steps[a] - x) ? i : a), 0));
  };
  chart.onpointerleave = chart.onblur = hide;
  chart.onkeydown = ({ key }) => {
    if (key === "ArrowRight") show(at + 1);
    if (key === "ArrowLeft") show(at - 1);
  };
}
document.documentElement.dataset.ready = "yes";
