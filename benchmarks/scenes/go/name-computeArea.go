package shapes

import "fmt"

func computeArea(width, height int) int {
	return width * height
}

func describeArea(width, height int) string {
	return fmt.Sprint(computeArea(width, height), " square metres")
}

func computeArea(▏width, height int) int {▕
