package shapes

// Shape is a figure with four measures.
type Shape interface {
	Area() float64
	Perimeter() float64
	Corners() int
}

// Square has four equal sides.
type Square struct {
	Side float64
}

func (s *Square) Area() float64 {
	return s.Side * s.Side
}

func (s *Square) Perimeter() float64 {
	return 4 * s.Side
}

func (s *Square) ▏≠Area…¦≠Perimeter…▕
	return 4
}
