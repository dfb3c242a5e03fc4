#include <stdlib.h>

struct limits {
	int width;
	int height;
	int depth;
};

struct limits read_limits(const char *width_text, const char *height_text, const char *depth_text)
{
	struct limits limits;
	int width = atoi(width_text);
	int height = atoi(height_text);
	int ▏≠width…¦≠height…▕

	limits.width = width;
	limits.height = height;
	limits.depth = depth;
	return limits;
}
