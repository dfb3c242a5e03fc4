package latency

import "sort"

// upperQuantileNanos returns the time below which this share of requests stays.
func upperQuantileNanos(times []int64, share float64) int64 {
	sorted := append([]int64(nil), times...)
	sort.Slice(sorted, func(i, j int) bool { return sorted[i] < sorted[j] })
	return sorted[int(share*float64(len(sorted)-1))]
}

// Slow reports whether one request in a hundred takes longer than the limit.
func Slow(times []int64, limit int64) bool {
	if len(times) == 0 {
		return false
	}
	return uppe▏rQuantileNanos…▕
}
