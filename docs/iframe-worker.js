// The site opened from disk: a browser starts no worker from a file, so the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inner = frame.contentWindow
      // what the script says, as a worker's global scope would hand it on
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.onload = () => resolve(inner)
        script.onerror = reject
        script.src = url
        inner.document.head.append(script)
      })
    }

    postMessage(data) {
      this.loaded.then(inner => inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
