package main

import (
	"fmt"

	"example.org/shapes/util"
)

func main() {
	width, height := 3, 4
	fmt.Println(util.computeAr▏ea…▕
}
