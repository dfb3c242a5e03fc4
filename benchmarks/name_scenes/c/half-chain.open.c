#include "sprocket.h"

/* The number of teeth that both sprockets have between them. */
int sprocket_tooth_gap(const struct sprocket *front, const struct sprocket *rear)
{
	return front->teeth > rear->teeth ? front->teeth - rear->teeth : rear->teeth - front->teeth;
}

void sprocket_init(struct sprocket *sprocket, int teeth)
{
	sprocket->teeth = teeth;
}
