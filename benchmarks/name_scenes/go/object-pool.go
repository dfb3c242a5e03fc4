package pool

import "sync"

// Cache keeps values by name.
type Cache struct {
	guard  sync.Mutex
	values map[string]string
}

// Get returns a value.
func (c *Cache) Get(name string) string {
	c.guard.Lock()
	defer c.guard.Unlock()
	return c.values[name]
}

// Pool keeps free workers.
type Pool struct {
	mutex sync.Mutex
	free  []int
}

// Put gives a worker back.
func (p *Pool) Put(worker int) {
	p.mutex.Lock()
	defer ▏p.mutex.Unlock()▕
	p.free = append(p.free, worker)
}
