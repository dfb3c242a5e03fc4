import { createElement, renderTree } from "./view";
import { subscribeToClock } from "./clock";

/** Writes the hour into the title of the page until the returned function is called. */
export function showHour(page: Document): () => void {
  return subscribeToClock((time) => {
    page.title = `${time.getHours()} o'clock`;
  });
}

/** Shows the time in an element until the returned function is called. */
export function showClock(root: HTMLElement): () => void {
  return sub▏scribeToClock(…▕
    renderTree(root, createElement("time", {}, time.toLocaleTimeString()));
  });
}

export function showDate(root: HTMLElement, date: Date): void {
  renderTree(root, createElement("time", {}, date.toLocaleDateString()));
}
