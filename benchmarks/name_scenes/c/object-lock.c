#include <pthread.h>

struct queue {
	pthread_mutex_t lock;
	int length;
};

struct stats {
	pthread_mutex_t guard;
	long sum;
};

int queue_length(struct queue *queue)
{
	int length;

	pthread_mutex_lock(&queue->lock);
	length = queue->length;
	pthread_mutex_unlock(&queue->lock);
	return length;
}

void stats_add(struct stats *stats, long value)
{
	pthread_mutex_lock(&stats->guard);
	stats->sum += value;
	pthread_mutex_unlock(▏&stats->guard);▕
}
