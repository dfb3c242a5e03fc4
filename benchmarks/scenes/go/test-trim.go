package text

import "testing"

func TestTrimSpaces(t *testing.T) {
	got := Trim("  a  ")
	want := "a"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTrimTabs(t *testing.T) {
	got := Trim("\ta\t")
	want := "a"
	if got != want {
		t.Err▏orf("got %q, want %q", got, want)▕
	}
}
