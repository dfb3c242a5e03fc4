import { Spring, wobbleOffsetAt } from "./spring";

const FRAMES_PER_SECOND = 60;

export class Animation {
  private frame = 0;

  constructor(private readonly spring: Spring) {}

  next(): number {
    this.frame += 1;
    return wob▏bleOffsetAt…▕
  }
}
