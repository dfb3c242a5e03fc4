package gadgets

import "errors"

// ErrEmpty is returned for a gadget without a name.
var ErrEmpty = errors.New("gadgets: empty name")

// frobnicateGadget turns the name of a gadget into its serial number.
func frobnicateGadget(name string, turns int) (string, error) {
	if name == "" {
		return "", ErrEmpty
	}
	return name[turns%len(name):] + name[:turns%len(name)], nil
}
