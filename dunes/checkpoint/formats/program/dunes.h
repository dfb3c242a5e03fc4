/* Generates text, or runs a network, from a folder that `dunes export --to cpp` wrote, without Python.

   Functions that return a pointer return NULL after an error, others a negative number; dunes_error() says what went
   wrong, in one line, in the thread that called. A folder contains native code: open only those that you trust.
   Several threads may use one model, each with texts of its own; their stacks need 2 MB. */
#ifndef DUNES_H
#define DUNES_H

#include <float.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DUNES_END (-1)
#define DUNES_ERROR (-2)

typedef struct dunes_model dunes_model;
typedef struct dunes_text dunes_text;

/* The sampling rules of Python's `dunes generate`, in the order in which they apply: type, name of the setting, option
   of the program, minimum, maximum, expected values. Temperature 0 is greedy. 0 in any other setting means no limit. */
#define DUNES_RULES(RULE)                                                                    \
  RULE(double, temperature, "--temperature T", 0, DBL_MAX, "a finite number of at least 0") \
  RULE(int64_t, top_k, "--top-k K", -1, INT64_MAX, "a whole number; 0 or -1 for all ids")   \
  RULE(double, top_p, "--top-p P", 0, 1, "a probability above 0")                           \
  RULE(double, min_p, "--min-p P", 0, 1, "a probability")                                   \
  RULE(double, typical_p, "--typical-p P", 0, 1, "a probability above 0")

/* Settings of sampling. Equal seeds give equal texts, also in Python. */
typedef struct {
#define DUNES_FIELD(type, name, ...) type name;
  DUNES_RULES(DUNES_FIELD)
  uint64_t seed;
} dunes_sampling;

const char *dunes_error(void);

/* How many threads compute, for the whole process. */
void dunes_set_threads(int threads);

/* Open a folder. Everything in it is compared with its checksums before any of its code runs. */
dunes_model *dunes_open(const char *folder);
void dunes_close(dunes_model *model); /* texts of it may be used further */

/* 1 for a model that generates text, 0 for another network. */
int dunes_generates(const dunes_model *model);

/* Why the model takes and gives ids only; empty if it has a tokenizer. */
const char *dunes_no_tokenizer(const dunes_model *model);

/* The ids of a prompt in UTF-8: returns how many there are, and writes up to `capacity` of them. */
int64_t dunes_prompt(const dunes_model *model, const char *text, int64_t bytes, int64_t *ids, int64_t capacity);

/* The bytes of an id, which may be part of a character, or none; valid as long as the model. */
const char *dunes_token(const dunes_model *model, int64_t id, int64_t *bytes);

/* Begin a text of up to `max_tokens` ids after the prompt. */
dunes_text *dunes_start(dunes_model *model, const int64_t *prompt, int64_t count, int64_t max_tokens,
                        const dunes_sampling *sampling);

/* The next id of the text; DUNES_END at its end, DUNES_ERROR after an error. */
int64_t dunes_next(dunes_text *text);
void dunes_free(dunes_text *text);

/* How many numbers a network takes and gives; `rows` and `columns` are the last two sizes of its input. */
int dunes_sizes(const dunes_model *model, int64_t *inputs, int64_t *outputs, int64_t *rows, int64_t *columns);

/* The outputs of a network; both arrays have the sizes above. */
int dunes_run(dunes_model *model, const float *input, float *output);

#ifdef __cplusplus
}
#endif
#endif
