import { formatCurrency } from "./currency";

export interface CartLine {
  name: string;
  cents: number;
}

export function cartTotal(lines: CartLine[], locale: string): string {
  const cents = lines.reduce((sum, line) => sum + line.cents, 0);
  return format▏Currency(cents, locale);▕
}
