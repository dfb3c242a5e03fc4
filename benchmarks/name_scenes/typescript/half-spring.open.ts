export interface Spring {
  stiffness: number;
  damping: number;
}

/** How far a spring has moved after some seconds. */
export function wobbleOffsetAt(spring: Spring, seconds: number): number {
  return Math.exp(-spring.damping * seconds) * Math.cos(Math.sqrt(spring.stiffness) * seconds);
}
