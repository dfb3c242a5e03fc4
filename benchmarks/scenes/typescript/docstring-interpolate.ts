/**
 * Interpolates between two values.
 *
 * @param start - The value at 0.
 * @param end - The value at 1.
 * @param fraction - Where to look, from 0 to 1.
 */
export function interpolate(start: number, end: number, fraction: number): number {
  return start + (end - start) * fraction;
}

/**
 * The fraction at which an interpolation has a value.
 *
 * @param start - The value at 0.
 * @param end - ▏The value at 1.▕
 * @param value - The value to find.
 */
export function findFraction(start: number, end: number, value: number): number {
  return (value - start) / (end - start);
}
