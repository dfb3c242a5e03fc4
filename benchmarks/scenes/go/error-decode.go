package profile

import (
	"encoding/json"
	"fmt"
	"os"
)

// Load reads a profile from a file and checks it.
func Load(path string) (*Profile, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("load profile: %w", err)
	}
	var profile Profile
	if err := json.Unmarshal(data, &profile); err != nil {
		return nil, fmt.Errorf("load profile: %w", err)
	}
	if err := profile.check(); err != nil {
		ret▏urn nil, fmt.Errorf("load profile: %w", err)▕
	}
	return &profile, nil
}
