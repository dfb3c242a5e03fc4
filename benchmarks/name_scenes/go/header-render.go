package report

import (
	"context"
	"io"
)

func renderTable(ctx context.Context, out io.Writer, rows [][]string) error {
	for _, row := range rows {
		for _, cell := range row {
			if _, err := io.WriteString(out, cell); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// Write writes the report.
func Write(ctx context.Context, out io.Writer, rows [][]string) error {
	return renderTable(▏ctx, out, rows)▕
}
