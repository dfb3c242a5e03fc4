import { createElement, renderTree } from "./view";
import { subscribeToClock } from "./clock";

export function showClock(root: HTMLElement): () => void {
  return sub▏scribeToClock((time) => {¦scribeToClock(…▕
    renderTree(root, createElement("time", {}, time.toLocaleTimeString()));
  });
}
