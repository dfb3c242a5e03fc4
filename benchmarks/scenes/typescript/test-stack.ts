import { Stack } from "./stack";

describe("Stack", () => {
  it("is empty at first", () => {
    const stack = new Stack<number>();
    expect(stack.size).toBe(0);
  });

  it("grows by a push", () => {
    const stack = new Stack<number>();
    stack.push(7);
    expect(stack.size).toBe(1);
  });

  it("returns the last value", () => {
    const st▏ack = new Stack<number>();▕
    stack.push(7);
    expect(stack.pop()).toBe(7);
  });
});
