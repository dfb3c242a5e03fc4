#include <stdbool.h>
#include "sprocket.h"

#define LARGEST_GAP 12

/* True if the chain can be moved from one sprocket to the other. */
bool chain_can_move(const struct sprocket *front, const struct sprocket *rear)
{
	if (front == rear)
		return true;
	return sprocket_too▏th_gap…▕
}
