package names

import "context"

func resolveAlias(ctx context.Context, alias string, depth int) (string, error) {
	if depth == 0 {
		return "", ErrDepth
	}
	return lookUp(ctx, alias)
}
