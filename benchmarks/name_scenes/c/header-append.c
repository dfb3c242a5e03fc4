#include <stdlib.h>
#include <string.h>

struct buffer {
	char *data;
	size_t length;
};

static int buffer_append(struct buffer *buffer, const char *text, size_t length)
{
	char *data = realloc(buffer->data, buffer->length + length);

	if (!data)
		return -1;
	memcpy(data + buffer->length, text, length);
	buffer->data = data;
	buffer->length += length;
	return 0;
}

int buffer_append_text(struct buffer *buffer, const char *text)
{
	size_t length = strlen(text);

	return buffer_append(▏buffer, text, length);▕
}
