package layout

// Box is a rectangle on the page.
type Box struct {
	Left, Top, Width, Height int
}

func addPadding(box Box, padding int) Box {
	return Box{box.Left - padding, box.Top - padding, box.Width + 2*padding, box.Height + 2*padding}
}

// Overlap tells whether two padded boxes share a point.
func Overlap(first, second Box, padding int) bool {
	first = addPadding(first, padding)
	second = addPadding(▏second, padding)▕
	return first.Left < second.Left+second.Width && second.Left < first.Left+first.Width &&
		first.Top < second.Top+second.Height && second.Top < first.Top+first.Height
}
