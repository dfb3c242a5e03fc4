package shapes

import "fmt"

func computeArea(width, height int) int {
	return width * height
}

// Describe says how large a rectangle is.

func computeArea(▏width, height int) int {▕
