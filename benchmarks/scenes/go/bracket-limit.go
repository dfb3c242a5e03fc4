package server

import "net/http"

func limitBody(handler http.Handler, maxBytes int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, maxBytes)
		handler.ServeHTTP(w, r)
	})
}

// Serve answers requests whose bodies are small enough.
func Serve(address string, handler http.Handler, maxBytes int64) error {
	return http.ListenAndServe(address, limitBody(▏handler, maxBytes▕))
}
