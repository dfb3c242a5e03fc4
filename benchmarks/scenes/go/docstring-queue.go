package queue

// Queue holds jobs in the order in which they came.
type Queue struct {
	jobs []string
}

// Push adds a job at the end.
func (q *Queue) Push(job string) {
	q.jobs = append(q.jobs, job)
}

// Pop removes the first job and returns it.
func (q *Queue) Pop() string {
	job := q.jobs[0]
	q.jobs = q.jobs[1:]
	return job
}

// Length re▏turns…▕
func (q *Queue) Length() int {
	return len(q.jobs)
}
