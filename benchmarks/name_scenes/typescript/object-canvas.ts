export function drawFrame(context: CanvasRenderingContext2D, width: number, height: number) {
  context.save();
  context.strokeRect(0, 0, width, height);
  context.restore();
}

export function drawCircle(layer: CanvasRenderingContext2D, x: number, y: number, radius: number) {
  layer.save();
  layer.beginPath();
  layer.arc(x, y, radius, 0, 2 * Math.PI);
  layer.stroke();
  ▏layer.restore();▕
}
