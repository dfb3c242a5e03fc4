class UploadError extends Error {}

export function checkUpload(file: File, maxBytes: number): void {
  if (file.size === 0) {
    throw new UploadError(`${file.name} is empty`);
  }
  if (file.size > maxBytes) {
    throw new UploadError(`${file.name} is too large`);
  }
  if (!file.type.startsWith("image/")) {
    thr▏ow new UploadError(`${file.name} is…▕
  }
}
