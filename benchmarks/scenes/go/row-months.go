package calendar

type month struct {
	name string
	days int
}

var months = []month{
	{"January", 31},
	{"February", 28},
	{"March", 31},
	{"April", 30},
}

var seasons = map[string]string{
	"January":  "winter",
	"February": "winter",
	"March":    "spring",
	"Apr▏il":    "spring",▕
}
