package jobs

import (
	"sync"
	"time"
)

func wait(ready *sync.WaitGroup, seconds int) {
	ready.Add(1)
	defer ready.Done()
	time.Sleep(time.Duration(seconds) * time.Second)
}

// Run starts the workers.
func Run(workers int, work func(int)) {
	var running sync.WaitGroup
	for number := 0; number < workers; number++ {
		running.Add(1)
		go func() {
			defer ▏running.Done()▕
			work(number)
		}()
	}
	running.Wait()
}
