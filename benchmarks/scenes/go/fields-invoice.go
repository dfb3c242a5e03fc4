package billing

// Invoice is what a customer owes.
type Invoice struct {
	Number   string
	Customer string
	Amount   int
	Currency string
}

// Copy returns an invoice with the same values.
func (invoice *Invoice) Copy() *Invoice {
	return &Invoice{
		Number:   invoice.Number,
		Customer: invoice.Customer,
		Amount:   invoice.Amount,
		Curr▏ency: invoice.Currency,▕
	}
}
