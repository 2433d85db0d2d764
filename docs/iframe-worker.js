// Browsers start no worker in a page that is opened as a file, so there the theme's search runs in a hidden frame.
// The file has the name under which the theme looks for such a replacement.
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      this.scope = this.frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.load(next)), this.ready)
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.scope.document.createElement("script")
      script.src = url
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = () => reject(new Error(`${url} cannot be read`))
        this.scope.document.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.IFrameWorker = window.Worker = FrameWorker // the theme looks for the first name
}
