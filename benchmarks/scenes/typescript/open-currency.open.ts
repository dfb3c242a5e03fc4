/** An amount of cents as people write it in a locale. */
export function formatCurrency(cents: number, locale: string): string {
  return new Intl.NumberFormat(locale, { style: "currency", currency: "EUR" }).format(cents / 100);
}

/** An amount of cents as it is printed on an invoice. */
export function formatPrice(cents: number, locale = "de"): string {
  return formatCurrency(cents, locale);
}
