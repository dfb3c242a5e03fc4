package names

import "context"

// Owner returns the name of the owner of an account.
func Owner(ctx context.Context, alias string) (string, error) {
	depth := 4
	owner, err := resolveAlias▏(ctx, alias, depth)▕
	if err != nil {
		return "", err
	}
	return owner, nil
}
