package gadgets

// Gadget is something with a name.
type Gadget struct {
	Name  string
	Turns int
}

// Serial returns the serial number of a gadget.
func (g *Gadget) Serial() (string, error) {
	serial, err := frob▏nicateGadget…▕
	if err != nil {
		return "", err
	}
	return serial, nil
}
