function clampChannel(value: number, lowest: number, highest: number): number {
  return Math.min(Math.max(value, lowest), highest);
}

export function brighten(color: Color, amount: number): Color {
  const red = clampChannel(color.red + amount, 0, 255);
  const green = clampChannel(color.green + amount, 0, 255);
  const blue = clampChannel(▏color.blue + amount, 0, 255);▕
  return { red, green, blue };
}

interface Color {
  red: number;
  green: number;
  blue: number;
}
