package report

import (
	"bufio"
	"os"
	"strings"
)

// Count returns the number of lines of a file.
func Count(path string) (int, error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	lines := 0
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		lines++
	}
	return lines, scanner.Err()
}

// Join reads the lines of a file and joins them by a separator.
func Join(path, separator string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	var lines []string
	scanner := buf▏io.NewScanner(file)▕
	for scanner.Scan() {
		lines = append(lines, scanner.Text())
	}
	return strings.Join(lines, separator), scanner.Err()
}
