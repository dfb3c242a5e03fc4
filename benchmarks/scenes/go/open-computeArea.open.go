package util

// computeArea is the area of a rectangle.
func computeArea(width, height int) int {
	return width * height
}
